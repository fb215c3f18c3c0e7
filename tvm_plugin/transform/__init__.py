"""tvm_plugin/transform."""
