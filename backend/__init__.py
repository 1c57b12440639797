"""The host side: stages, engine, store, training, and the agent that the console talks to. Never imports textual."""
