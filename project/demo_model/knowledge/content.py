"""Facts about what is in the notebooks: export, import, storage limits. Data only."""

from project.demo_model.knowledge.fact import Fact

CONTENT: tuple[Fact, ...] = (
    Fact(
        id="export-all",
        topic="data export",
        answer=(
            "Export everything under Settings > Privacy > Export data; you get a ZIP of Markdown files and "
            "images by email."
        ),
        key_terms=("Export data", "Markdown files"),
        keywords="export data download everything backup zip copy",
        questions=(
            "How do I export my data?",
            "Can I download all my notebooks?",
            "I want a copy of everything",
            "full backup of my notes",
            "take my content with me",
            "data export",
            "save all my notes to my computer",
        ),
    ),
    Fact(
        id="export-time",
        topic="data export",
        answer="An export is usually ready within an hour; the download link stays valid for 3 days.",
        key_terms=("within an hour", "3 days"),
        keywords="export time long ready link valid expired wait",
        questions=(
            "How long does an export take?",
            "My export is not ready yet",
            "The download link has expired",
            "when will I receive the export file",
            "export waiting time",
            "for how many days does the export link work",
        ),
    ),
    Fact(
        id="export-format",
        topic="data export",
        answer="A single notebook can be saved as PDF, Word, Markdown or HTML from its menu under Save as.",
        key_terms=("Word, Markdown or HTML",),
        keywords="export format pdf word html markdown single notebook save",
        questions=(
            "Can I export a notebook as PDF?",
            "Which export formats are there?",
            "save a page as Word document",
            "convert my notebook to html",
            "print to pdf",
            "download one notebook only",
        ),
    ),
    Fact(
        id="export-auto",
        topic="data export",
        answer=(
            "Automatic backups to Dropbox or Google Drive run every night once you connect them under "
            "Integrations > Backup."
        ),
        key_terms=("Integrations > Backup", "every night"),
        keywords="automatic backup dropbox google drive nightly scheduled",
        questions=(
            "Can I back up automatically?",
            "scheduled export",
            "Do you sync backups to Dropbox?",
            "save my notebooks to Google Drive every day",
            "nightly backup",
            "I want regular backups without doing anything",
        ),
    ),
    Fact(
        id="import-evernote",
        topic="import",
        answer="Import notes from Evernote, Notion or OneNote under Settings > Import; files up to 2 GB are fine.",
        key_terms=("Evernote, Notion or OneNote", "2 GB"),
        keywords="import evernote notion onenote migrate move notes",
        questions=(
            "How do I import from Evernote?",
            "Can I bring my notes from Notion?",
            "migrate from OneNote",
            "import notes",
            "move my old notes from another app to Quillbox",
            "transfer notes from a different service",
        ),
    ),
    Fact(
        id="import-csv",
        topic="import",
        answer="Tables come in as CSV: press Insert > Table from file; up to 20,000 rows are read.",
        key_terms=("Table from file", "20,000 rows"),
        keywords="import csv table spreadsheet excel rows",
        questions=(
            "Can I import a CSV file?",
            "How do I bring in a spreadsheet?",
            "import table from excel",
            "csv import",
            "turn a spreadsheet into a table in my notebook",
            "how many rows can a table have",
        ),
    ),
    Fact(
        id="storage-limit",
        topic="limits",
        answer="Storage is 10 GB on Solo, 100 GB per seat on Team, and unlimited on Business.",
        key_terms=("100 GB per seat",),
        keywords="storage space limit gb how much disk quota",
        questions=(
            "How much storage do I get?",
            "What is the storage limit?",
            "disk space per plan",
            "how many gigabytes are included",
            "quota",
            "is there unlimited space",
        ),
    ),
    Fact(
        id="storage-full",
        topic="limits",
        answer=(
            "When storage is full, empty the trash, remove large files listed under Settings > Storage, or buy "
            "50 GB more for $3 a month."
        ),
        key_terms=("empty the trash", "50 GB more"),
        keywords="storage full free space buy more out of space",
        questions=(
            "My storage is full",
            "How do I free up space?",
            "Can I buy more storage?",
            "I ran out of space",
            "no room left for new files",
            "extra gigabytes price",
        ),
    ),
    Fact(
        id="file-size",
        topic="limits",
        answer="A single attachment may be up to 250 MB; larger files should be shared as links.",
        key_terms=("250 MB",),
        keywords="file size attachment upload maximum large too big",
        questions=(
            "What is the maximum file size?",
            "My upload is too big",
            "attachment limit",
            "How large can an uploaded video be?",
            "file upload fails because of its size",
            "biggest attachment allowed",
        ),
    ),
    Fact(
        id="trash-restore",
        topic="limits",
        answer="Deleted pages stay in the Trash for 30 days; open Trash in the sidebar and choose Put back.",
        key_terms=("Put back", "Trash for 30 days"),
        keywords="trash deleted page restore recover notebook bin",
        questions=(
            "How do I recover a deleted page?",
            "I deleted a notebook by mistake",
            "Where is the trash?",
            "restore a note",
            "get back a page I threw away",
            "how long do deleted pages stay in the bin",
        ),
    ),
)
