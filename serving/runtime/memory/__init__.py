"""The three ports within one process: nodes on a network whose faults are values and methods."""
