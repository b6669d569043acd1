"""systemd units for heads and nodes, so that they come back after a reboot, a cut cable or a crash."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from dfbench.cluster.head import token_path

CARRIED = ("DFBENCH_HOME", "HF_HOME")
"""Variables that say where things lie: a unit takes them over where they are set. None may be a secret."""


def unit(service: str, description: str, arguments: Sequence[str], *, auth: bool) -> str:
    """The text of a unit that keeps `dfbench ARGUMENTS` running. It names the token's file and never the token."""
    command = shlex.join([sys.executable, "-m", "dfbench.cluster.cli", *arguments])
    return f"""\
# Save as /etc/systemd/system/{service}.service, then: sudo systemctl enable --now {service}
# To end it for good: sudo systemctl disable --now {service}
[Unit]
Description={description}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
User={getpass.getuser()}
WorkingDirectory={Path.home()}
Environment="PATH={Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
Environment="RAY_AUTH_MODE={"token" if auth else "disabled"}" "RAY_AUTH_TOKEN_PATH={token_path()}"
Environment="RAY_USAGE_STATS_ENABLED=0"{_carried()}
ExecStart={command.replace("%", "%%")}
Restart=always
RestartSec=10
TimeoutStopSec=45
LimitNOFILE=65536

[Install]
WantedBy=multi-user.target
"""


def _carried() -> str:
    """The carried variables that are set, each on a line of its own."""
    set_here = [f"{name}={os.environ[name]}" for name in CARRIED if os.environ.get(name)]
    escaped = (text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") for text in set_here)
    return "".join(f'\nEnvironment="{text}"' for text in escaped)
