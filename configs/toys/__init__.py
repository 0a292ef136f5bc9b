"""The tasks of the debug configs, and start policies of 2.4M parameters that a run trains itself, so that `debug` needs no download.

sum_digits, counting, guess_number, calculator: the tasks; calculator_agent: calculator over HTTP
warm_start: trains a start policy and caches it      small_tokenizer: its byte-level tokenizer
answer_recipes, conversation_recipes: the example answers for single-turn tasks and for conversations
"""
