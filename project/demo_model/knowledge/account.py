"""Facts about one person's account: sign-in, two-factor security, profile, deletion. Data only."""

from project.demo_model.knowledge.fact import Fact

ACCOUNT: tuple[Fact, ...] = (
    Fact(
        id="login-forgot",
        topic="login",
        answer="Use Forgot password on the sign-in page; the reset link works for 2 hours.",
        key_terms=("Forgot password", "2 hours"),
        keywords="forgot password reset link lost login",
        questions=(
            "I forgot my password",
            "How do I reset my password?",
            "Can't remember my password",
            "password reset",
            "I need a new password because I lost the old one",
            "what do i do when my password is gone",
            "send me a password link",
        ),
    ),
    Fact(
        id="login-no-email",
        topic="login",
        answer=(
            "If the reset email does not come, look in your spam folder and allow mail from no-reply@quillbox.example."
        ),
        key_terms=("spam folder", "no-reply@quillbox.example"),
        keywords="reset email missing not received spam mail",
        questions=(
            "I did not receive the reset email",
            "The password mail never arrived",
            "No email from you",
            "reset link is not coming",
            "where is the message with the reset link",
            "I requested a new password but nothing is in my inbox",
        ),
    ),
    Fact(
        id="login-locked",
        topic="login",
        answer=(
            "After 10 wrong passwords an account is locked for 30 minutes; then you can try again or reset the "
            "password."
        ),
        key_terms=("10 wrong passwords", "30 minutes"),
        keywords="account locked wrong password too many attempts blocked",
        questions=(
            "My account is locked",
            "Too many login attempts",
            "I typed the wrong password too often",
            "locked out of my account",
            "how long does the lock last after failed sign-ins",
            "it says my login is blocked for now",
        ),
    ),
    Fact(
        id="login-google",
        topic="login",
        answer="You can sign in with Google or Apple: connect them under Settings > Sign-in methods.",
        key_terms=("Google or Apple", "Sign-in methods"),
        keywords="sign in google apple social login connect",
        questions=(
            "Can I log in with Google?",
            "sign in with Apple",
            "Do you support social login?",
            "connect my Google account",
            "I don't want another password, can I use my gmail to sign in?",
            "link apple id",
        ),
    ),
    Fact(
        id="login-sessions",
        topic="login",
        answer=(
            "See all signed-in devices under Settings > Devices, and press Sign out everywhere to end every session."
        ),
        key_terms=("Sign out everywhere",),
        keywords="devices sessions signed in log out everywhere remote",
        questions=(
            "How do I log out of all devices?",
            "Where can I see my active sessions?",
            "I left my account open on another computer",
            "sign out remotely",
            "which devices are logged in to my account",
            "lost my phone, how do I end the session on it",
        ),
    ),
    Fact(
        id="password-change",
        topic="login",
        answer="Change your password under Settings > Security > Password; it needs at least 12 characters.",
        key_terms=("at least 12 characters",),
        keywords="change password new requirements characters length",
        questions=(
            "How do I change my password?",
            "Where can I set a new password?",
            "What are the password rules?",
            "minimum password length",
            "I want to pick a stronger password",
            "how many characters must a password have",
        ),
    ),
    Fact(
        id="2fa-on",
        topic="security",
        answer=(
            "Turn on two-factor sign-in under Settings > Security > Two-factor and scan the QR code with an "
            "authenticator app."
        ),
        key_terms=("scan the QR code", "authenticator app"),
        keywords="2fa two-factor enable turn on mfa authenticator qr",
        questions=(
            "How do I turn on two-factor authentication?",
            "enable 2FA",
            "How can I make my account more secure?",
            "set up an authenticator app",
            "activate mfa",
            "I want a second factor when I log in",
            "protect my account with a code",
        ),
    ),
    Fact(
        id="2fa-lost",
        topic="security",
        answer="If you lost your phone, sign in with one of the ten backup codes you got when you enabled two-factor.",
        key_terms=("ten backup codes",),
        keywords="2fa lost phone backup codes new phone authenticator gone",
        questions=(
            "I lost my phone and can't get my 2FA code",
            "My authenticator app is gone",
            "How do I log in without my second factor?",
            "new phone, two-factor does not work",
            "what are backup codes",
            "my codes are on a broken phone, how do I get in",
        ),
    ),
    Fact(
        id="2fa-reset",
        topic="security",
        answer="Without phone and backup codes, ask support for a two-factor reset; for your safety it takes 48 hours.",
        key_terms=("two-factor reset", "48 hours"),
        keywords="2fa reset no backup codes support recover locked",
        questions=(
            "I have no backup codes either",
            "Can support reset my two-factor?",
            "I lost both my phone and my recovery codes",
            "2fa reset",
            "remove two-factor for me, I cannot sign in",
            "how long does resetting the second factor take",
        ),
    ),
    Fact(
        id="2fa-off",
        topic="security",
        answer="To turn two-factor off, press Disable under Settings > Security and confirm with a current code.",
        key_terms=("press Disable", "current code"),
        keywords="2fa turn off disable remove two-factor",
        questions=(
            "How do I turn off two-factor?",
            "disable 2FA",
            "I don't want the login code any more",
            "remove two-step verification",
            "Stop asking me for a code each time",
            "switch off mfa",
        ),
    ),
    Fact(
        id="2fa-sms",
        topic="security",
        answer="We do not send codes by SMS, because phone numbers can be stolen; use an app or a security key.",
        key_terms=("by SMS", "security key"),
        keywords="sms text message code phone 2fa security key",
        questions=(
            "Can I get my login code by SMS?",
            "Do you send codes by text message?",
            "sms two-factor",
            "Why is there no text message option?",
            "use my phone number for verification",
            "do you support hardware keys like yubikey",
        ),
    ),
    Fact(
        id="security-hacked",
        topic="security",
        answer=(
            "If you think someone else is in your account, change the password, end all sessions and write to "
            "security@quillbox.example."
        ),
        key_terms=("security@quillbox.example",),
        keywords="hacked stolen account compromised someone else access security",
        questions=(
            "I think my account was hacked",
            "Someone else is using my account",
            "There is a login I don't know",
            "my account was compromised",
            "a stranger changed my notebooks",
            "report a security problem",
            "who do I tell about a break-in",
        ),
    ),
    Fact(
        id="security-encryption",
        topic="security",
        answer="Your notebooks are encrypted in transit with TLS and at rest with AES-256.",
        key_terms=("AES-256", "TLS"),
        keywords="encryption encrypted secure data safe stored",
        questions=(
            "Is my data encrypted?",
            "How do you protect my notebooks?",
            "What encryption do you use?",
            "are my notes stored securely",
            "how safe is my content on your servers",
            "data at rest encryption",
        ),
    ),
    Fact(
        id="email-change",
        topic="profile",
        answer=(
            "To change your email address, edit it under Settings > Profile and click the link we send to the "
            "new address."
        ),
        key_terms=("Settings > Profile", "new address"),
        keywords="change email address profile update new mail",
        questions=(
            "How do I change my email address?",
            "I have a new email",
            "update my mail address",
            "I no longer use the email on my account",
            "switch the account to another email",
            "my login email is wrong",
        ),
    ),
    Fact(
        id="name-change",
        topic="profile",
        answer="Your display name and photo can be edited by clicking your avatar in the top right corner.",
        key_terms=("avatar", "top right corner"),
        keywords="name photo avatar picture display profile change",
        questions=(
            "How do I change my name?",
            "Where can I upload a profile picture?",
            "update my display name",
            "change avatar",
            "my name is spelled wrong in the app",
            "set a new photo of me",
        ),
    ),
    Fact(
        id="language-change",
        topic="profile",
        answer="Choose the language under Settings > Appearance; Quillbox speaks 14 languages.",
        key_terms=("Settings > Appearance", "14 languages"),
        keywords="language change interface translate spanish german",
        questions=(
            "How do I change the language?",
            "Is Quillbox available in Spanish?",
            "The app is in the wrong language",
            "set interface to German",
            "which languages do you support",
            "switch the menus to french",
        ),
    ),
    Fact(
        id="notifications",
        topic="profile",
        answer=(
            "Choose which emails you get under Settings > Notifications; a weekly digest can replace single messages."
        ),
        key_terms=("Settings > Notifications", "weekly digest"),
        keywords="notifications emails too many stop newsletter mute",
        questions=(
            "How do I stop email notifications?",
            "I get too many emails from you",
            "turn off notifications",
            "unsubscribe from the newsletter",
            "can I mute the alerts",
            "only send me a summary once a week",
        ),
    ),
    Fact(
        id="delete-account",
        topic="deletion",
        answer=(
            "To erase your account for good, open Settings > Privacy > Delete account. It cannot be undone after "
            "7 days."
        ),
        key_terms=("Delete account", "undone after 7 days"),
        keywords="delete account erase permanently remove everything forever",
        questions=(
            "How do I delete my account?",
            "Erase everything you have about me",
            "permanently remove my account",
            "I want all my data gone",
            "delete my profile forever",
            "close the account completely and wipe it",
        ),
    ),
    Fact(
        id="delete-restore",
        topic="deletion",
        answer="A deleted account can be restored within 7 days by signing in and pressing Restore account.",
        key_terms=("Restore account",),
        keywords="restore deleted account recover bring back undo delete",
        questions=(
            "Can I restore a deleted account?",
            "I deleted my account by accident",
            "bring back my erased account",
            "undo account deletion",
            "recover an account I removed yesterday",
            "I regret deleting my profile",
        ),
    ),
    Fact(
        id="two-accounts",
        topic="profile",
        answer="Two accounts can be merged by support: write from both email addresses and say which account to keep.",
        key_terms=("can be merged", "both email addresses"),
        keywords="merge two accounts combine duplicate join",
        questions=(
            "Can I merge two accounts?",
            "I have two accounts by mistake",
            "combine my work and private account",
            "merge accounts",
            "I signed up twice, join them into one",
            "move everything from one account to the other",
        ),
    ),
)
