"""Static inputs of a pass: what each row of a frame sees, chain or tree."""

from __future__ import annotations

import numpy as np
import torch

from dfbench.workers.graphs import Frame


def test_a_frame_says_what_each_row_sees() -> None:
    frame = Frame(4, torch.device("cpu"))
    frame.fill(10, [5, 6])
    assert frame.seen.tolist() == np.tri(4).tolist()
    assert (int(frame.past), frame.ids[0, :2].tolist()) == (10, [5, 6])
    assert frame.positions.tolist() == [[10, 11, 12, 13]]
    frame.fill(11, [5, 6, 7], [0, 1, 1], np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]))
    assert frame.positions[0, :3].tolist() == [11, 12, 12]
    assert frame.seen.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0]]
    frame.fill(12, [5])
    assert frame.seen.tolist() == np.tri(4).tolist()
