"""Demonstration only: starting policies of 2.4M parameters that a run trains itself, so that `debug` needs no download.

Training from a checkpoint (hf_assets_path) uses nothing in this folder.

warm_start: trains such a policy and caches it       small_tokenizer: its byte-level tokenizer
answer_recipes, conversation_recipes: the example answers for single-turn tasks and for conversations
"""
