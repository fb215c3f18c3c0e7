"""tvm_plugin/measure."""
