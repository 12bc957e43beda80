"""Give chosen keys a random prefix: theirs was the start of the digest, and lists show it."""

import secrets

from django.db import migrations
from django.db.models import F


def hide(apps, schema_editor):
    keys = apps.get_model("streamserve", "ApiKey").objects
    for pk in keys.filter(digest__startswith=F("prefix")).values_list("pk", flat=True):
        keys.filter(pk=pk).update(prefix=secrets.token_hex(4))


class Migration(migrations.Migration):
    dependencies = [("streamserve", "0004_watch_streams")]

    operations = [migrations.RunPython(hide, migrations.RunPython.noop)]
