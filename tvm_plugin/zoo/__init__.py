"""tvm_plugin/zoo."""
