"""CUDA graphs: a step's kernels recorded once and launched as one, so that the host has nothing to do between steps."""

import torch


def capture(step):
    """Record `step`, a function without arguments that works on tensors at fixed addresses and never waits for the device, and return its
    `replay`. It is run once before, for what the first run alone does (compiling, choosing algorithms); so reset what it changes.

    Replays give the very bits of direct runs: the same kernels in the same order. Random draws belong outside.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on loading and saving
        step()
    return graph.replay


class Replayed:
    """A function of tensors, giving one or a tuple of them, that is captured at its first call for a combination of shapes, dtypes and other
    arguments, then replayed. Each combination holds memory for its tensors as long as this object lives."""

    def __init__(self, function):
        self.function, self.captured = function, {}

    def __call__(self, *arguments):
        tensors = [value for value in arguments if torch.is_tensor(value)]
        key = tuple((value.shape, value.dtype) if torch.is_tensor(value) else value for value in arguments)
        if key not in self.captured:
            # Usable whatever the mode of the first caller, on the tensors' GPU.
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(tensors[0].device):
                self.captured[key] = self._capture(arguments)
        inputs, output, replay = self.captured[key]
        for fixed, tensor in zip(inputs, tensors):
            fixed.copy_(tensor)
        with torch.cuda.device(tensors[0].device):
            replay()
        return tuple(one.clone() for one in output) if isinstance(output, tuple) else output.clone()

    def _capture(self, arguments):
        fixed = [value.clone() if torch.is_tensor(value) else value for value in arguments]
        result = []
        replay = capture(lambda: result.append(self.function(*fixed)))
        return [value for value in fixed if torch.is_tensor(value)], result[-1], replay
