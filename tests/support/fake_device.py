"""A device whose streams run as much out of order as their events allow, and whose blocks say what they hold.

Operations are enqueued with what they must wait for: the one before on their stream, and events. They run only when
`finish` asks for one: then those that it depends on run too, in a random order, and at random some others that may.
So whatever is not ordered by a wait is, sooner or later, seen to happen in the wrong order.
"""

from __future__ import annotations


class Op:
    def __init__(self, name, action, after):
        self.name, self.action, self.after, self.done = name, action, [op for op in after if op is not None], False


class FakeDevice:
    """Blocks are any values. Fits SwapSpace (`SwapDevice`); `compute` enqueues a step's own work."""

    block_bytes = 1000

    def __init__(self, num_blocks, num_cpu_blocks, rng):
        self.num_blocks, self.num_cpu_blocks, self.rng = num_blocks, num_cpu_blocks, rng
        self.blocks = [None] * num_blocks
        self.host = [None] * num_cpu_blocks
        self.ops = []
        self.last = {"compute": None, "swap": None}
        self.waits = {"compute": [], "swap": []}
        self.copied = 0

    def enqueue(self, stream, name, action):
        op = Op(name, action, [self.last[stream], *self.waits[stream]])
        self.waits[stream] = []
        self.last[stream] = op
        self.ops.append(op)
        return op

    def compute(self, name, action):
        return self.enqueue("compute", name, action)

    def copy_out(self, pairs):
        self._copy(pairs, "out", self.blocks, self.host)

    def copy_in(self, pairs):
        self._copy(pairs, "in", self.host, self.blocks)

    def _copy(self, pairs, name, sources, targets):
        """One enqueued operation for all, done one pair at a time in a random order."""
        if not pairs:
            return
        assert len({target for _, target in pairs}) == len(pairs), f"copies {name} fill a block twice: {pairs}"
        self.copied += len(pairs)

        def act():
            for source, target in self.rng.sample(list(pairs), len(pairs)):
                value = sources[source]
                targets[target] = value.copy() if hasattr(value, "copy") else value

        self.enqueue("swap", f"{name} {pairs}", act)

    def swap_waits(self):
        self.waits["swap"].append(self.last["compute"])

    def mark(self):
        return self.last["swap"]

    def compute_waits(self, event):
        self.waits["compute"].append(event)

    def synchronize(self):
        self._run({id(op) for op in self.ops})

    def close(self):
        self.host = []

    def finish(self, op, eager=0.3):
        """Run `op`, what it depends on, and at random (with this probability each) others that may run by then."""
        needed, stack = set(), [op]
        while stack:
            one = stack.pop()
            if not one.done and id(one) not in needed:
                needed.add(id(one))
                stack += one.after
        self._run(needed | {id(other) for other in self.ops if self.rng.random() < eager})

    def _run(self, wanted):
        while True:
            ready = [op for op in self.ops if id(op) in wanted and all(before.done for before in op.after)]
            if not ready:
                break
            op = self.rng.choice(ready)
            op.action()
            op.done, op.after = True, []
            self.ops.remove(op)
