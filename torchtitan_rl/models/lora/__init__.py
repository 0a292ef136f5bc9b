"""LoRA: its settings, the adapters of the policy, and adapter folders of peft."""
