"""tvm_plugin/tasks."""
