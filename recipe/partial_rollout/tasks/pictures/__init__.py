"""Clock-10 whose target is in a picture: the embedded task of images, for their quick start and its tests.

Problems, demonstrations and reward are clock10's. The prompt has a picture in place of the target: a digit, as many
squares, or a patch whose colour stands for it. The model is a Qwen3-VL whose language part begins with clock10's weights.
"""
