from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('streamserve', '0013_batch_once'),
    ]

    operations = [
        migrations.AddField(
            model_name='storedfile',
            name='request_digest',
            field=models.CharField(editable=False, help_text='SHA-256 of the upload that came with the key.', max_length=64, null=True),
        ),
        migrations.AddField(
            model_name='storedfile',
            name='request_key',
            field=models.CharField(editable=False, help_text='SHA-256 of the caller and Idempotency-Key.', max_length=64, null=True, unique=True),
        ),
    ]
