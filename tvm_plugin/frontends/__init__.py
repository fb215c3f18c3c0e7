"""tvm_plugin/frontends."""
