"""A LangChain chain on a model in this process.

pip install -e '.[langchain]'   (in a clone)
python examples/langchain_chain.py [MODEL]
"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from deepseek_flash import FlashEngine
from deepseek_flash.integrations.langchain import ChatDeepSeekFlash

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

with FlashEngine(model) as engine:
    # Chat models and LLMs may share one engine; give `model=` instead of `engine=` and it is opened on first use.
    llm = ChatDeepSeekFlash(engine=engine, temperature=0.0, max_new_tokens=24)
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You answer in one short sentence."), ("human", "What is the capital of {country}?")]
    )
    chain = prompt | llm | StrOutputParser()

    print("invoke:", chain.invoke({"country": "France"}))
    print("stream: ", end="")
    for piece in chain.stream({"country": "Japan"}):
        print(piece, end="", flush=True)
    print()
    print("batch: ", chain.batch([{"country": name} for name in ("Italy", "Peru", "Egypt")]))
