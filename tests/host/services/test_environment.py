"""Which variables a service gets from the shell that installs it."""

from __future__ import annotations

from firn.host.services.environment import passed_on


def test_where_models_are_and_how_they_are_fetched() -> None:
    wanted = {
        "HF_HOME": "/Volumes/disk/hf",
        "HF_HUB_CACHE": "/Volumes/disk/hub",
        "HF_TOKEN": "hf_x",
        "HF_ENDPOINT": "https://mirror.example",
        "HTTPS_PROXY": "http://proxy:3128",
        "no_proxy": "localhost",
        "SSL_CERT_FILE": "/etc/company.pem",
        "REQUESTS_CA_BUNDLE": "/etc/company.pem",
        "MLX_ENABLE_TF32": "0",
    }
    others = {"FIRN_PORT": "9", "PATH": "/bin", "HOME": "/me", "HF_HUB_OFFLINE": "", "XHF_A": "1"}
    assert passed_on({**others, **wanted}) == wanted
