"""TFLite models: TVM's importer, with converters of our own, and LiteRT as reference."""
