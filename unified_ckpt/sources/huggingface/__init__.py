"""What Hugging Face's Trainer, Accelerate and PEFT write, as a Source."""
