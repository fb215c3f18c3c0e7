"""PyTorch models, modules or programs of torch.export: TVM's importer, with converters of our own."""
