"""What the mocker's answers say."""
