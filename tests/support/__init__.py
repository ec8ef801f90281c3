"""What tests of several rooms share: real servers, stacks and commands, and how to wait for them."""
