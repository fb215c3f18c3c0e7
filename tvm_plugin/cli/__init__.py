"""tvm_plugin/cli."""
