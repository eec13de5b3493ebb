"""The weights of a network: a name, file, folder or hub id → tensors. One file a layout."""
