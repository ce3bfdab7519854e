"""LangChain's own unit suite."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from deepseek_flash.integrations.langchain import ChatDeepSeekFlash
from tests.support.fake_engine import FakeEngine


class TestUnitByName(ChatModelUnitTests):
    """A wrapper that would open its own engine: nothing here may open it."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatDeepSeekFlash

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "a-model-that-must-not-be-opened"}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestUnitWithEngine(TestUnitByName):
    """A wrapper around an open engine."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": FakeEngine()}
