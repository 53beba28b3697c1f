"""chai: a file of prompts into videos, reusing what related prompts already rendered."""
