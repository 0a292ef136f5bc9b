"""Folders of tasks as Harbor has them: shell commands in a sandbox, judged by the tasks' own tests."""

from torchtitan_rl.environments.harbor.harbor_task import Harbor
