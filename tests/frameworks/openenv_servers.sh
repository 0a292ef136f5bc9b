#!/bin/bash
# Starts a server of one session (--conversations.max-open 1) for verifiers' taskset `openenv`; docs/agents.md makes the venvs.
#   openenv_servers.sh dipg     port 8102; DIPG_DATASET_PATH names questions, as its data set is on the hub. Each line has
#                               `messages`: the user's, with <context> and <question>, and the right answer
#   openenv_servers.sh verse    port 8103, resets [{"split": "train", "index": 24}]: OpenEnv makes a server of a package of verifiers
set -e
case "$1" in
dipg)
    python3 -m venv dipg_venv && dipg_venv/bin/pip install openenv-dipg-safety==0.1.67
    exec dipg_venv/bin/python -m uvicorn med_safety_gym.app:app --port 8102
    ;;
verse)
    packages_venv/bin/pip install openenv==0.4.1
    packages_venv/bin/pip install --no-deps --target stardata_source staros-stardata==0.1.1
    packages_venv/bin/openenv import stardata_source --name verse --output-dir . --env-class stardata.envs.constraint_gym:load_environment
    sed -i 's/self._vf_env = _load_environment()/self._vf_env = _LOADED/' verse/server/verse_environment.py
    echo '_LOADED = _load_environment()' >> verse/server/verse_environment.py # verifiers 0.1 can be loaded in the main thread alone
    exec packages_venv/bin/python -m verse.server.app --port 8103
    ;;
*)
    echo "usage: $0 dipg|verse" >&2
    exit 2
    ;;
esac
