"""Complete a prompt, stream an answer, hold a conversation.

python examples/quickstart.py [MODEL]
"""

import sys

from deepseek_flash import FlashEngine, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

with FlashEngine(model) as engine:
    # Raw text in, a Completion out.
    done = engine.generate("The three states of matter are", max_new_tokens=16, temperature=0.0, stop=".")
    print("generate:", done.text.strip())
    print("         ", done.usage.completion_tokens, "tokens, ended by", done.finish_reason)

    # The same, piece by piece. Whole characters only; leaving the loop early cancels the request.
    print("stream:  ", end="")
    for delta in engine.stream("Once upon a time", max_new_tokens=24, temperature=0.7, seed=1):
        print(delta.text, end="", flush=True)
    print()

    # A conversation goes through the checkpoint's own chat template.
    messages = [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=32)
    answer = engine.chat(messages, greedy)
    print("chat:    ", answer.text.strip())

    # Sent again with more behind it, the conversation so far comes from the cache.
    messages += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "Which river flows through it?"},
    ]
    again = engine.chat(messages, greedy)
    print("chat:    ", again.text.strip())
    print("         ", again.usage.cached_tokens, "of", again.usage.prompt_tokens, "prompt tokens from the cache")

    print(engine.memory_report())
