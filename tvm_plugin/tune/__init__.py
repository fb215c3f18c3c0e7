"""tvm_plugin/tune."""
