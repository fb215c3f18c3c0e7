"""A Ray cluster: builders are tasks, each device is an actor."""
