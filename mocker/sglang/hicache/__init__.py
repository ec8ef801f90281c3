"""HiCache: host memory as a second place for the KV of SGLang's radix tree."""
