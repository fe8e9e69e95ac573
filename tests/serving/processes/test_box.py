"""What a process writes into its black box is read in another, also after its death."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_a_dead_process_has_told_what_it_was_at():
    script = """
        import os, signal
        from mlsys_serving.processes import Boxes
        boxes = Boxes(3)
        pid = os.fork()
        if pid == 0:
            box = boxes.box(4)
            box.receive()
            box.begin([5, 6], limit_s=0.0)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        box = boxes.box(1)  # three rows: 4 and 1 are the same
        print(box.owners(), box.is_late(), box.num_received, box.num_begun, boxes.box(0).owners())
        box.clear()
        print(box.owners(), box.is_late(), box.num_received)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["(5, 6) True 1 1 ()", "() False 0"]
