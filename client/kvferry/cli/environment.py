"""Options that also come from the environment."""

import click
from click.core import ParameterSource


class FromEnvironment(click.Command):
    """A command whose refusals name the environment variable, where the value came from one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse. Raises UsageError."""
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = error.param.name if error.param is not None else None
            if name is None or ctx.get_parameter_source(name) is not ParameterSource.ENVIRONMENT:
                raise
            msg = f"{error.message.rstrip('.')} (from the environment variable {ctx.auto_envvar_prefix}_{name.upper()})"
            raise click.BadParameter(msg, ctx, error.param, error.param_hint) from None
