"""Hugging Face's own tools on sparse models: the Trainer that is killed and resumes, Auto classes, the hub."""

import os
import subprocess
import sys
from pathlib import Path

from support.hub import TOKEN, running_hub


def test_a_run_of_the_trainer_that_is_killed_ends_as_an_undisturbed_one_and_is_shared(tmp_path):
    script = Path(__file__).parents[2] / "support" / "hugging_face_user.py"
    with running_hub() as hub:
        places = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        environment = {**os.environ, **places, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, script, tmp_path, "me/digits"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "from_pretrained" in hub.files("me/digits")["README.md"].decode()
