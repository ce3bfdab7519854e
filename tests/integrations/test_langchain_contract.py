"""What LangChain users rely on, on a scripted engine and on a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from deepseek_flash import ContextLengthError
from deepseek_flash.integrations.langchain import ChatDeepSeekFlash, DeepSeekFlashLLM

Maker = Callable[..., Any]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
QUESTIONS = [f"Tell me about the number {i}" for i in range(6)]


@pytest.fixture(params=[DeepSeekFlashLLM, ChatDeepSeekFlash], ids=["llm", "chat"])
def make(request: pytest.FixtureRequest, engine: Any) -> Maker:
    return lambda **options: request.param(engine=engine, **{**GREEDY, **options})


def text_of(result: Any) -> str:
    return result if isinstance(result, str) else result.content


def joined(chunks: list[Any]) -> Any:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


def test_L02_S04_stream_comes_in_pieces_that_join_to_what_invoke_returns(make: Maker) -> None:
    model = make()
    chunks = list(model.stream(QUESTIONS[0]))
    assert len([c for c in chunks if text_of(c)]) > 2
    assert text_of(joined(chunks)) == text_of(model.invoke(QUESTIONS[0])) != ""


async def test_L02_async_paths_give_the_same_text(make: Maker) -> None:
    model = make()
    expected = text_of(model.invoke(QUESTIONS[1]))
    assert text_of(await model.ainvoke(QUESTIONS[1])) == expected
    chunks = [c async for c in model.astream(QUESTIONS[1])]
    assert len([c for c in chunks if text_of(c)]) > 2
    assert text_of(joined(chunks)) == expected


async def test_batches_keep_their_order(make: Maker) -> None:
    model = make()
    expected = [text_of(model.invoke(q)) for q in QUESTIONS]
    assert len(set(expected)) > 1
    assert [text_of(r) for r in model.batch(QUESTIONS)] == expected
    assert [text_of(r) for r in await model.abatch(QUESTIONS)] == expected
    done = dict(model.batch_as_completed(QUESTIONS))
    assert [text_of(done[i]) for i in range(len(QUESTIONS))] == expected


async def test_one_bad_prompt_in_a_batch_fails_alone_with_an_error_both_sides_know(make: Maker) -> None:
    model = make()
    prompts = [QUESTIONS[0], "far too long " * 2000, QUESTIONS[1]]
    for results in (model.batch(prompts, return_exceptions=True), await model.abatch(prompts, return_exceptions=True)):
        assert [isinstance(r, Exception) for r in results] == [False, True, False]
        assert isinstance(results[1], ContextLengthError)
        assert isinstance(results[1], ContextOverflowError)
        assert results[1].tokens > results[1].limit > 0
        assert text_of(results[2]) == text_of(model.invoke(QUESTIONS[1]))
    with pytest.raises(ContextOverflowError):
        model.batch(prompts)


def test_L01_stop_of_the_constructor_of_bind_and_of_the_call(make: Maker) -> None:
    whole = text_of(make().invoke(QUESTIONS[2]))
    early, late = whole[len(whole) // 3], whole[len(whole) // 2 :][:2]
    first = whole.index(early)
    assert text_of(make(stop=[early]).invoke(QUESTIONS[2])) == whole[:first]
    assert text_of(make(stop=early).invoke(QUESTIONS[2])) == whole[:first]
    assert text_of(make().bind(stop=[early]).invoke(QUESTIONS[2])) == whole[:first]
    by_call = make(stop=[early]).invoke(QUESTIONS[2], stop=[late])
    assert text_of(by_call) == whole[: whole.index(late)]
    assert text_of(make(stop=[early]).invoke(QUESTIONS[2], stop=[])) == whole
    assert "".join(text_of(c) for c in make(stop=[early]).stream(QUESTIONS[2], stop=[late])) == text_of(by_call)


def test_prompt_pipe_model_pipe_parser(make: Maker) -> None:
    model = make()
    prompt = (
        PromptTemplate.from_template("Tell me about {thing}")
        if isinstance(model, DeepSeekFlashLLM)
        else ChatPromptTemplate.from_messages([("system", "Be brief"), ("human", "Tell me about {thing}")])
    )
    chain = prompt | model | StrOutputParser()
    answer = chain.invoke({"thing": "cats"})
    assert answer == text_of((prompt | model).invoke({"thing": "cats"})) != ""
    assert "".join(chain.stream({"thing": "cats"})) == answer
    assert chain.batch([{"thing": "cats"}] * 2) == [answer, answer]


async def test_prompt_pipe_model_is_as_good_in_asyncio(make: Maker) -> None:
    chain = PromptTemplate.from_template("Say {x}") | make() | StrOutputParser()
    many = await asyncio.gather(*(chain.ainvoke({"x": f"number {i}"}) for i in range(5)))
    assert many == [chain.invoke({"x": f"number {i}"}) for i in range(5)]


def test_L04_L05_usage_of_the_stream_equals_that_of_invoke_and_stands_on_one_chunk(engine: Any) -> None:
    chat = ChatDeepSeekFlash(engine=engine, **GREEDY)
    whole = chat.invoke(QUESTIONS[3])
    chunks = list(chat.stream(QUESTIONS[3]))
    total = joined(chunks)
    assert isinstance(whole, AIMessage)
    assert isinstance(total, AIMessageChunk)
    assert whole.usage_metadata is not None
    assert total.usage_metadata is not None
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert total.usage_metadata[name] == whole.usage_metadata[name] > 0
    assert sum(c.usage_metadata is not None for c in chunks) == 1
    assert chunks[-1].usage_metadata is not None
    assert [c.chunk_position for c in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert total.response_metadata == whole.response_metadata
    assert whole.response_metadata["model_provider"] == "deepseek_flash"
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.response_metadata["model_name"]


def test_L07_tokens_are_counted_by_the_models_own_tokenizer(engine: Any) -> None:
    text = "How many tokens are in here?"
    for model in (DeepSeekFlashLLM(engine=engine), ChatDeepSeekFlash(engine=engine)):
        assert model.get_token_ids(text) == engine.tokenize(text, add_special_tokens=False)
        assert model.get_num_tokens(text) == len(engine.tokenize(text, add_special_tokens=False)) > 0
    chat = ChatDeepSeekFlash(engine=engine, **GREEDY)
    messages = [SystemMessage("Be brief."), HumanMessage(text)]
    counted = chat.get_num_tokens_from_messages(messages)
    answer = chat.invoke(messages)
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == counted > chat.get_num_tokens(text)
    assert chat.get_num_tokens_from_messages([]) == 0
    assert ChatDeepSeekFlash(engine=engine, custom_get_token_ids=lambda _: [1, 2, 3]).get_num_tokens(text) == 3


def test_L08_only_new_text_is_returned(make: Maker) -> None:
    assert not text_of(make().invoke(QUESTIONS[4])).startswith(QUESTIONS[4])


def test_logprobs_come_in_openai_shape_streamed_or_not(make: Maker, engine: Any) -> None:
    model = make(logprobs=1)
    if isinstance(model, DeepSeekFlashLLM):
        info = model.generate([QUESTIONS[5]]).generations[0][0].generation_info or {}
        content = info["logprobs"]["content"]
    else:
        whole = model.invoke(QUESTIONS[5])
        content = whole.response_metadata["logprobs"]["content"]
        assert joined(list(model.stream(QUESTIONS[5]))).response_metadata["logprobs"]["content"] == content
    ids = [entry["token_id"] for entry in content]
    assert len(ids) == 12
    for entry in content:
        assert entry["token"] == engine.detokenize([entry["token_id"]], skip_special_tokens=False)
        assert entry["logprob"] <= 0.0
        assert entry["top_logprobs"][0]["logprob"] >= entry["logprob"]


def test_several_answers_and_generate(make: Maker) -> None:
    model = make(n=3, temperature=1.0, seed=5)
    if isinstance(model, DeepSeekFlashLLM):
        result = model.generate(QUESTIONS[:2])
    else:
        result = model.generate([[HumanMessage(q)] for q in QUESTIONS[:2]])
    assert [len(g) for g in result.generations] == [3, 3]
    usage = (result.llm_output or {})["token_usage"]
    assert usage["completion_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    with pytest.raises(ValueError, match="n=3"):
        next(model.stream(QUESTIONS[0]))
