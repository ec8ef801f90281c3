"""Environment variables that no setting names."""

OTHERS = {
    "CUDA_VISIBLE_DEVICES": "GPUs that engines may use. `dynabench run` and `serve` divide them among the workers.",
    "DYN_CLUSTER_TOKEN_SECRET": "In a cluster: Secret with the cluster token (default: dynabench-cluster-token).",
    "DYN_LOG": "What is logged, in the syntax of RUST_LOG: `info,serving.routing=debug`, or `serving.routing` for all that it logs. `-v` and `-vv` replace it.",
    "DYN_SERVICE_ACCOUNT_DIR": "In a cluster: folder with the token and certificates of the pod's service account (default: Kubernetes' own).",
    "DYN_SYSTEM_PORT": "Port at which a process answers `/live` and `/health`, for the probes of a cluster (default: none).",
    "DYN_TOKEN_ECHO_DELAY_MS": "Echo engines: pause before each token (ms, such as 10 or 0.5; default: 10).",
    "DYNABENCH_COMPILE": "`1` while the package is installed: compile its cores. This needs a C compiler.",
    "DYNABENCH_KV_SECRET": "`dynabench vllm`: what stand-ins that hand KV to each other across hosts all know, at least 16 bytes.",
    "HF_HOME": "Where models from Hugging Face are kept (default: in your home folder).",
    "HF_HUB_DISABLE_PROGRESS_BARS": "`0` shows the progress of downloads from Hugging Face (default: `1`).",
    "HF_TOKEN": "Token for private models on Hugging Face.",
    "NO_COLOR": "If set, help and tables have no colours.",
    "OPENAI_API_KEY": "Key for another server: that of `dynabench run --url`, of `out=http://...` and of `python -m serving.openai`.",
    "POD_IP": "In a cluster: the pod's address, for `DYN_TCP_RPC_HOST` where that is not set.",
    "POD_NAME": "In a cluster: the pod's name, by which a planner knows it.",
    "POD_NAMESPACE": "In a cluster: the namespace whose objects are used (default: that of the pod's service account).",
    "POD_UID": "In a cluster: the pod's identity, to which what it registers belongs.",
    "PYTHONHASHSEED": "`dynabench vllm`: seed of the names of blocks in KV events, as in vLLM.",
    "SSL_CERT_FILE": "Certificates of the authorities to trust instead of the system's, as for `dynabench run --url https://...`.",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "`1` lets clients of `dynabench vllm` load and unload adapters.",
    "VLLM_API_KEY": "`dynabench vllm`: key that clients must send, if there is no `--api-key`.",
    "VLLM_CPU_KVCACHE_SPACE": "vLLM's size of the KV cache on a CPU (GiB); it wins over `--memory-fraction`.",
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "`0`: KV events of `dynabench vllm` name blocks by all bytes of their hashes, not by 64 bits.",
    "VLLM_LOG_STATS_INTERVAL": "`dynabench vllm`: how often throughput and queues are logged (s; default: 10).",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "Address at which vLLM's workers, or stand-ins for them, ask each other for KV (default: 127.0.0.1; for stand-ins localhost).",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "First port there (default: one that is free; for stand-ins 5600).",
    "VLLM_SERVER_DEV_MODE": "`1` gives `dynabench vllm` vLLM's routes for development.",
    "VLLM_USE_SIMPLE_KV_OFFLOAD": "`1` keeps KV in host memory by vLLM's SimpleCPUOffloadConnector.",
    "XDG_RUNTIME_DIR": "Where the discovery folder and shared memory are (default: the folder for temporary files).",
    "XDG_STATE_HOME": "Where the history of a chat is kept (default: `.local/state` in your home folder).",
}

OURS = (
    "DYNABENCH_FRONTEND_GROUP",
    "DYNABENCH_LISTEN_FD",
    "DYNABENCH_SETTINGS",
    "DYNABENCH_STATUS_FD",
    "DYNABENCH_STEP_LOG",
    "DYNABENCH_SUPERVISED",
)
"""Variables that processes of ours set for their children."""
