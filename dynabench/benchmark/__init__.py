"""`dynabench bench`: what an endpoint gives at each load, up to where its throughput stops growing or limits are missed."""
