"""What each owner uses of each model a day: rows/usage_days.py."""

from decimal import Decimal
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('streamserve', '0006_responses'),
    ]

    operations = [
        migrations.CreateModel(
            name='UsageDay',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('day', models.DateField(editable=False, verbose_name='day')),
                ('owner', models.CharField(editable=False, max_length=64, verbose_name='owner')),
                ('tenant', models.CharField(editable=False, max_length=64, verbose_name='tenant')),
                ('team', models.CharField(blank=True, editable=False, max_length=64, verbose_name='team')),
                ('model', models.CharField(editable=False, max_length=200, verbose_name='model')),
                ('kind', models.CharField(choices=[('answer', 'answer'), ('job', 'job'), ('batch', 'batch'), ('title', 'title'), ('embedding', 'embedding')], editable=False, max_length=10, verbose_name='kind')),
                ('requests', models.PositiveBigIntegerField(default=0, editable=False, verbose_name='requests')),
                ('prompt_tokens', models.PositiveBigIntegerField(default=0, editable=False, verbose_name='prompt tokens')),
                ('cached_tokens', models.PositiveBigIntegerField(default=0, editable=False, verbose_name='cached tokens')),
                ('completion_tokens', models.PositiveBigIntegerField(default=0, editable=False, verbose_name='completion tokens')),
                ('reasoning_tokens', models.PositiveBigIntegerField(default=0, editable=False, verbose_name='reasoning tokens')),
                ('accepted_tokens', models.PositiveBigIntegerField(default=0, editable=False, verbose_name='accepted tokens')),
                ('errors', models.PositiveBigIntegerField(default=0, editable=False, verbose_name='errors')),
                ('refused', models.PositiveBigIntegerField(default=0, editable=False, verbose_name='refused')),
                ('engine_seconds', models.FloatField(default=0.0, editable=False, verbose_name='engine seconds')),
                ('cost', models.DecimalField(decimal_places=9, default=Decimal('0'), editable=False, max_digits=20, verbose_name='cost')),
            ],
            options={
                'verbose_name': 'usage',
                'verbose_name_plural': 'usage',
                'ordering': ('-day', 'owner', 'model', 'kind'),
                'default_permissions': ('view',),
                'indexes': [models.Index(fields=['tenant', '-day'], name='streamserve_usage_of')],
                'constraints': [models.UniqueConstraint(fields=('day', 'owner', 'model', 'kind', 'team'), name='streamserve_usage_once')],
            },
        ),
    ]
