"""Install a wheel into an empty folder and use it from another: python tests/installed.py dist/cgt_torch-*.whl"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import cgt, torch, importlib.metadata
assert cgt.__file__.startswith({site!r}), cgt.__file__
said = importlib.metadata.version("cgt-torch")
assert said.split("+")[0] == cgt.__version__, said
assert "torch==" + ".".join(torch.__version__.split(".")[:2]) + ".*" in importlib.metadata.requires("cgt-torch")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())

@cgt.jit
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

from pathlib import Path
assert {{"py.typed", "__init__.pyi"}} <= {{p.name for p in Path(cgt.__file__).parent.iterdir()}}
losses = [step(torch.ones(2, 4)).item() for _ in range(8)]
assert cgt.stats(step).replays >= 4 and losses[-1] < losses[0], cgt.explain(step)
print("cgt", said, "installed, imported, replayed")
"""


def main(wheel):
    with tempfile.TemporaryDirectory() as site, tempfile.TemporaryDirectory() as elsewhere:
        subprocess.run([sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--target", site, str(wheel)], check=True)
        program = Path(elsewhere, "program.py")
        program.write_text(PROGRAM.format(site=site))
        subprocess.run([sys.executable, str(program)], check=True, cwd=elsewhere, env={**os.environ, "PYTHONPATH": site})


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
