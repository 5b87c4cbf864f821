#!/usr/bin/env bash
# Serve a model with keys and values of 4.25 bits; then: python examples/client.py
#
#   examples/serve.sh [MODEL [OPTION OF vllm serve ...]]
#
# vLLM must be patched (packed-kv-patch apply). Without a model, the checkout's demo model is served.
set -euo pipefail
model=${1:-$(dirname "${BASH_SOURCE[0]}")/../models/demo-7m}
exec vllm serve "$model" --kv-cache-dtype tq4 "${@:2}"
