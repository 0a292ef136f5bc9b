"""An optimizer of your own: docs/extending.md. Set `config.trainer.optimizer = MuonAndAdamW.Config(lr=1e-4)`."""

from dataclasses import dataclass

import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from torchtitan_rl.trainer.optimizer import AdamW


class Optimizers(OptimizersContainer):
    @staticmethod
    def _resolve_optimizer_factory(name):
        return {"Muon": torch.optim.Muon, "AdamW": torch.optim.AdamW}[name]


class MuonAndAdamW(AdamW):
    @dataclass(kw_only=True, slots=True)
    class Config(AdamW.Config):
        def build(self, *, model):
            kwargs = {"lr": self.lr, "weight_decay": self.weight_decay}
            matrices = r"layers\..*\.(attention|feed_forward)\.(?!.*norm).*weight$"
            muon = ParamGroupConfig(pattern=matrices, optimizer_name="Muon", optimizer_kwargs=kwargs)
            kwargs = {**kwargs, "betas": self.betas}
            adamw = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=kwargs)
            return Optimizers(OptimizersContainer.Config(param_groups=[muon, adamw]), model_parts=[model])
