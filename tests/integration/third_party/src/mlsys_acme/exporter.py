def write(recording, path):
    path.write_text("".join(f"{span.name},{span.duration_ns}\n" for span in recording.spans))
