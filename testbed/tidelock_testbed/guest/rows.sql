-- Says for ever how many rows the clients' table has.
DO $$
DECLARE
    count bigint;
BEGIN
    LOOP
        IF to_regclass('rows') IS NOT NULL THEN
            EXECUTE 'SELECT count(*) FROM rows' INTO count;
            RAISE NOTICE 'ROWS %', count;
        END IF;
        COMMIT;
        PERFORM pg_sleep(0.05 + coalesce(count, 0) / 1e5);
    END LOOP;
END $$;
