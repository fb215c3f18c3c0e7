"""tvm_plugin/report."""
