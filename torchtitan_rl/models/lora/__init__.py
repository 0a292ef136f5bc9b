"""LoRA outside the trainer: the adapter in the engine, and adapter folders of peft."""
