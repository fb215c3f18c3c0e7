"""Other machines, by TVM's RPC tracker. The server that they run is `eqtune.measure.rpc_server`."""
