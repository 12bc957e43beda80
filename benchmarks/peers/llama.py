"""llama-server, as the wheel `xllamacpp` has it. Runs in llama.cpp's environment:

    python -m benchmarks.peers.llama MODEL.gguf PORT NUM_SLOTS CONTEXT NUM_THREADS

Samplers and batch sizes are llama-server's defaults. The context is one cache that all slots share, as it is there
without `--parallel`: apart, each slot would need room for the longest prompt.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp

_PROMPT_CACHE_MIB = 512  # of prompts that have left their slot; llama-server's 8192 would be too much for six servers


def main() -> None:
    """Serve until SIGTERM."""
    path, port, num_slots, context, num_threads = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_parallel, params.n_ctx, params.kv_unified = int(num_slots), int(context), True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(num_threads)
    params.n_gpu_layers, params.fit_params, params.cache_ram_mib = 0, False, _PROMPT_CACHE_MIB
    ended = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait(ended)


if __name__ == "__main__":
    main()
