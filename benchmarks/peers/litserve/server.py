"""LitServe with the models of `mlsys bench core-oip-front`, or the encoder, on the JSON form of the inference route.

    python -m venv .peers/litserve
    .peers/litserve/bin/pip install -r benchmarks/peers/litserve/requirements.txt
    .peers/litserve/bin/python benchmarks/peers/litserve/server.py 18100
    mlsys bench core-oip-front peers=litserve@127.0.0.1:18100@-@PID

With ``--encoder FOLDER [WAIT_MS]``: see `mlsys bench dvabatch-over-http`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import litserve  # type: ignore[import-not-found]
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))


class Double(litserve.LitAPI):  # type: ignore[misc]
    """A model that doubles its input, in 2 ms a batch."""

    def setup(self, device):  # type: ignore[no-untyped-def]
        """Do nothing: there is nothing to load."""

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        """Return the first input's row."""
        return np.array(request["inputs"][0]["data"], np.float32)

    def predict(self, x):  # type: ignore[no-untyped-def]
        """Double a row, or an array of rows if batches are made."""
        time.sleep(0.002)
        return x * np.float32(2)

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        """Return the protocol's JSON of one row."""
        row = {"name": "y", "datatype": "FP32", "shape": [1, len(output)], "data": output.tolist()}
        return {"outputs": [row]}


class Encoder(litserve.LitAPI):  # type: ignore[misc]
    """Sentences to vectors."""

    def setup(self, device):  # type: ignore[no-untyped-def]
        """Load the encoder, in the worker."""
        from sentence_model import embedder

        self.embed = embedder(Path(sys.argv[3]))

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        """Return one text."""
        return request["inputs"][0]["data"][0]

    def batch(self, inputs):  # type: ignore[no-untyped-def]
        """Return the texts as they are."""
        return inputs

    def predict(self, texts):  # type: ignore[no-untyped-def]
        """Encode all texts at once."""
        return list(self.embed(texts))

    def unbatch(self, output):  # type: ignore[no-untyped-def]
        """Return one vector for each text."""
        return output

    encode_response = Double.encode_response


def main() -> None:
    """Serve until SIGTERM."""
    if "--encoder" in sys.argv:
        wait_s = float(sys.argv[4]) / 1e3 if len(sys.argv) > 4 else 0.0
        path = "/v2/models/all-minilm-l6-v2/infer"
        apis = [Encoder(max_batch_size=64, batch_timeout=wait_s, api_path=path)]
    else:
        apis = [
            Double(max_batch_size=size, batch_timeout=0.0, api_path=f"/v2/models/{name}/infer")
            for name, size in (("unbatched", 1), ("batched", 16))
        ]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[1]), host="127.0.0.1", generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
