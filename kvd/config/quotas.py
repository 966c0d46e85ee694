"""The setting `quota`: floors and caps of models."""

import tomllib
from typing import Any

from kvd.config.about import Mark
from kvd.config.quota import QuotaTable, quotas_of
from kvd.errors import ConfigError


class QuotasText(Mark):
    """Marks the field that holds the table of quotas."""

    explains = True

    @property
    def needs(self) -> str:
        """What a value must be, for people."""
        return (
            "for each model floor, cap or both, a size or a percentage of the pool, such as"
            ' {llama = {floor = "8GiB", cap = "50%"}}; in the file also as a section [quota.llama]'
        )

    def parse(self, text: str) -> Any:
        """The table from what a variable or a flag says: TOML in one line.

        Raises:
            ConfigError: it is none.
        """
        try:
            return tomllib.loads(f"quota = {text}\n")["quota"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not TOML in one line: {error}") from error

    def check(self, value: QuotaTable) -> None:
        """Look whether every entry can be read.

        Raises:
            ConfigError: one cannot; it names model, key and value.
        """
        quotas_of(value, 0)
