"""ONNX models, protos or files: TVM's importer, with converters of our own, and ONNX Runtime as reference."""
