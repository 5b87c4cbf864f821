"""Refusals: facts about an engine, a model and a layer, and the table of rules that reads them. No torch."""
